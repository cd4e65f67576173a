"""What ``mode=NAME`` does: the function ``run(command)`` of NAME.py. ``conf.MODES`` lists the names."""
