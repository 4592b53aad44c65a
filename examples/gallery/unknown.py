"""Notice unknown images: three drawn shapes, and three pictures of something else."""

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import duplex
from duplex.data.shapes import draw

data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
duplex.fit(data, "closed_form").save("model", force=True)
recognizer = duplex.Recognizer.load("model")

shapes = [draw(f"{name}/9002.png") for name in ("red_star", "dotted_ring", "blue_house")]
rows, columns = np.mgrid[:64, :64]
waves, noise = 128 + 127 * np.sin(rows * columns / 40), np.random.default_rng(0).integers(0, 256, (64, 64))
others = [Image.fromarray(np.uint8(plane)).convert("RGB") for plane in (4 * (rows ^ columns), waves, noise)]
images = [*shapes, *others]

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
for place, image, answer in zip(axes, images, recognizer(images)):
    words = answer.best.name if answer.in_distribution else "none of these?"
    print(f"distance {answer.distance:5.1f}: {words}")
    place.imshow(image)
    place.set_title(words, size=6)
    place.axis("off")
figure.savefig("unknown.png")
