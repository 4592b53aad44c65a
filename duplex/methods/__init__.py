"""Methods that recognise compositions, one module per kind of method (CLIP, CSP, Troika, Duplex, ...).

All read cached encoder outputs, even where a method's paper trains the image encoder.
"""
