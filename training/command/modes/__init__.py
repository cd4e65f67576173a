"""The modes: ``mode=NAME`` calls the function ``run(command)`` of NAME.py. ``conf.MODES`` lists the names."""
