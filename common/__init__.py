"""Modules that every package may use: errors that a user can act on, files, and properties of this machine."""

from common import namesakes  # noqa: F401  it installs itself
