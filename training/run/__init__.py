"""One run: its objects and checks, and what each of its ranks does from the first step to the summary."""
