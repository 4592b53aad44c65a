"""Write a method: score a pair by the distances to the means of its state and of its object."""

import torch

import duplex
from duplex.methods.base import Method


class Means(Method[duplex.Options]):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.register_buffer("states", torch.zeros(len(self.labels.states), context.dim))
        self.register_buffer("objects", torch.zeros(len(self.labels.objects), context.dim))

    def start(self, train):  # nothing else is learned
        for means, index in zip((self.states, self.objects), self.primitives(train.compositions)):
            means.copy_(torch.stack([train.cls[index == i].mean(0) for i in range(len(means))]))

    def scorer(self, candidates):
        m, n = self.primitives(torch.as_tensor(candidates))
        return lambda x: -torch.cdist(x["cls"], self.states)[:, m] - torch.cdist(x["cls"], self.objects)[:, n]


data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
table = duplex.evaluate(duplex.fit(data, Means), data, world="closed").table().round(1)
print(table)
errors = [table["value"] - table["low"], table["high"] - table["value"]]
figure = table["value"].plot.bar(yerr=errors, figsize=(3, 2.2), rot=0).figure
figure.savefig("own_method.png")
