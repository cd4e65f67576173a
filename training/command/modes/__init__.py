"""The modes: ``mode=NAME`` calls the function ``run(composed)`` of NAME.py. ``conf.MODES`` lists the names.

A run itself (``training.command.launch``, ``training.run``) knows the modes train, eval and predict only. Another mode
that trains or evaluates sets ``cfg.mode`` to one of them, or calls ``training.studies.short_run``.
"""
