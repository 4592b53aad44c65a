"""Find wrong labels: exchange 5 % of them, and see how many come first among the suspects."""

import subprocess

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image

table = pd.read_csv("shapes.csv")
rng = np.random.default_rng(0)
spoiled = rng.choice(len(table), len(table) // 20, replace=False)
table.loc[spoiled, ["state", "object"]] = table.loc[rng.permutation(spoiled), ["state", "object"]].to_numpy()
table.drop(columns="split").to_csv("spoiled.csv", index=False)
subprocess.run(["duplex", "suspects", "spoiled.csv", "--images", "shapes", "--force"], check=True, capture_output=True)

suspects = pd.read_csv("suspects/spoiled/suspects.csv").head(len(spoiled))
found = suspects["image"].isin(table["image"][spoiled]).mean()
print(f"{len(spoiled)} of {len(table)} labels were exchanged; of as many first suspects, {found:.0%} are among them")

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
for place, row in zip(axes, suspects.itertuples()):
    place.imshow(Image.open(f"shapes/{row.image}"))
    place.set_title(f"“{row.state} {row.object}”", size=7)
    place.axis("off")
figure.savefig("wrong_labels.png")
