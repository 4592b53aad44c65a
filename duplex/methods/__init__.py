"""The methods: one module each, and the protocol they share (`base`)."""
