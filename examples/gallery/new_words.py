"""Add words without training: a model that never saw fur ranks furry pairs by their prompts."""

import matplotlib.pyplot as plt
import pandas as pd

import duplex
from duplex.data.shapes import draw

table = pd.read_csv("shapes.csv")
table[table["state"] != "furry"].drop(columns="split").to_csv("not_furry.csv", index=False)
data = duplex.load_dataset("not_furry.csv", images="shapes", encoder="tiny")
duplex.fit(data, "closed_form").save("bald", force=True)
objects = ["star", "heart", "moon", "house", "ring", "cloud"]
recognizer = duplex.Recognizer.load("bald", new_share=0.5).with_compositions([f"furry {thing}" for thing in objects])

images = [draw(f"furry_{thing}/9001.png") for thing in objects]
answers = recognizer(images, top=200)
for thing, answer in zip(objects, answers):
    place = [guess.name for guess in answer.top].index(f"furry {thing}") + 1
    print(f"furry {thing:5} place {place} of {len(answer.top)}, answer: {answer.best.name}")

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
for place, image, answer in zip(axes, images, answers):
    place.imshow(image)
    place.set_title(answer.best.name, size=7)
    place.axis("off")
figure.savefig("new_words.png")
