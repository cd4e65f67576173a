"""Questions that many runs answer: which layout is fastest, are all layouts equal, what has a sweep found."""
