"""Compare two methods on the same test images, and plot their seen–unseen curves."""

import matplotlib.pyplot as plt

import duplex

data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
results = {name: duplex.evaluate(duplex.fit(data, name), data, world="closed") for name in ("clip", "closed_form")}
print(duplex.compare(results["clip"], results["closed_form"]).drop(columns="p").round(1))  # the second minus the first

figure, axes = plt.subplots(figsize=(3, 2.2), layout="constrained")
for name, result in results.items():
    axes.plot(result.curve["unseen"], result.curve["seen"], label=f"{name}, AUC {result.auc:.1f}")
axes.set(xlabel="accuracy, unseen pairs", ylabel="accuracy, seen pairs")
axes.legend(fontsize=7)
figure.savefig("compare.png")
