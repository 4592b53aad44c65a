"""The packaged tiny CLIP: an open_clip model small enough to ship, for the embedded benchmark `shapes`."""
