"""What careless and hostile use does to the commands: a result or one sentence, and nothing of the user's is harmed."""
