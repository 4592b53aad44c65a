"""A trained run answering about pictures: the recogniser, its exports, its server."""
