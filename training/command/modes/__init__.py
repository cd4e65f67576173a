"""What ``mode=NAME`` does: the function ``run(command)`` of NAME.py. ``conf.schema.Mode`` lists the names."""
