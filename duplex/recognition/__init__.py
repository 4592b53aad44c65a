"""Recognise images with trained models; fit, update, export and serve models."""
