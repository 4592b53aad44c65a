"""Draw a labelled data set: the benchmark of shapes, 64 × 64 pixels each, with its split."""

from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

from duplex.data.shapes import render_images, shapes_manifest

table = shapes_manifest()
render_images(table, Path("shapes"))
table.to_csv("shapes.csv", index=False)
pairs = table.drop_duplicates(["split", "state", "object"])
print(table.groupby("split").size().to_string())
print(len(pairs.query("split == 'train'")), "pairs have training images")

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
for place, row in zip(axes, table.sample(6, random_state=2).itertuples()):
    place.imshow(Image.open(f"shapes/{row.image}"))
    place.set_title(f"{row.state} {row.object}", size=7)
    place.axis("off")
figure.savefig("draw.png")
