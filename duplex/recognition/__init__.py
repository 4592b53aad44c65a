"""Recognition with a trained model: the recognizer, its exports and its server."""
