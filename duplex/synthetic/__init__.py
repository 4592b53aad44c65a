"""Drawing of small images: outlines (objects), looks (states) and styles (background, light and noise).

The data set `shapes` (duplex/data/shapes.py) and the training images of the packaged tiny CLIP are drawn by these
modules, which import nothing else of duplex.
"""

from duplex.synthetic.looks import LOOKS, Look
from duplex.synthetic.outlines import OUTLINES
from duplex.synthetic.scene import HARSH, MILD, SIDE, Style, draw_image, random_stream

__all__ = ["HARSH", "LOOKS", "MILD", "OUTLINES", "SIDE", "Look", "Style", "draw_image", "random_stream"]
