"""Search for a pair without images: compose its prototype, and sort test images by cosine."""

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import duplex

data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
table, features = data.manifest, data.features / np.linalg.norm(data.features, axis=1, keepdims=True)
train, test = table["split"] == "train", np.flatnonzero(table["split"] == "test")
unseen = set(zip(table.state[test], table.object[test])) - set(zip(table.state[train], table.object[train]))

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
state, thing = sorted(unseen)[0]
prototype = features[train & (table.state == state)].mean(0) + features[train & (table.object == thing)].mean(0)
prototype -= features[train].mean(0)
nearest = test[np.argsort(-features[test] @ prototype)[:6]]
print(f"test images nearest to {state} {thing}, which has no training image:")
for place, row in zip(axes, table.iloc[nearest].itertuples()):
    print(f"  {row.state} {row.object}")
    place.imshow(Image.open(f"shapes/{row.image}"))
    place.set_title(f"{row.state} {row.object}", size=7)
    place.axis("off")
figure.savefig("prototypes.png")
