"""What every room may use: errors that a user can act on, files, and what is known of this machine."""
