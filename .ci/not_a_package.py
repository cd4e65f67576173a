"""The build backend of pyproject.toml: ``pip install .`` ends in a sentence, and not in a guess at what to install."""

raise SystemExit(
    "This is a program that runs from its folder, not a package: pip install -r requirements.txt, then python "
    "train.py. For `import training` in programs elsewhere, put the folder on PYTHONPATH (docs/python.md)"
)
