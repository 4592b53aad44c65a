"""Drawing of small images: outlines (objects), looks (states) and styles (background, light and noise).

The embedded benchmark and the tiny CLIP's training corpus both draw with this package, which imports neither.
"""

from duplex.synthetic.looks import LOOKS, Look
from duplex.synthetic.outlines import OUTLINES
from duplex.synthetic.scene import HARSH, MILD, SIDE, Style, draw_image, random_stream

__all__ = ["HARSH", "LOOKS", "MILD", "OUTLINES", "SIDE", "Look", "Style", "draw_image", "random_stream"]
