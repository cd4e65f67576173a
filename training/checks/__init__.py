"""What is checked before a run begins: that its values and this machine allow it, and that its ranks are alike."""
