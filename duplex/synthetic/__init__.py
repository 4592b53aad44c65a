"""Small pictures of shapes: outlines (what), looks (in which state) and styles (how harshly photographed).

It knows no data set and no encoder, so that the benchmark and the tiny CLIP's own corpus may both draw with it and
neither has to know the other.
"""

from duplex.synthetic.looks import LOOKS, Look
from duplex.synthetic.outlines import OUTLINES
from duplex.synthetic.scene import HARSH, MILD, SIDE, Style, picture, stream

__all__ = ["HARSH", "LOOKS", "MILD", "OUTLINES", "SIDE", "Look", "Style", "picture", "stream"]
