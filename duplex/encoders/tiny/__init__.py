"""The packaged tiny CLIP: an open_clip architecture with weights small enough to ship, for the embedded benchmark."""
