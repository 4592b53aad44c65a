"""Recognise new images: fit a model, save it, load it, and answer pairs it was never shown."""

import matplotlib.pyplot as plt

import duplex
from duplex.data.shapes import draw

data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
duplex.fit(data, "closed_form").save("model", force=True)
recognizer = duplex.Recognizer.load("model", new_share=0.5)  # half of the images below show new pairs

names = ["green_star", "striped_moon", "hollow_house", "blue_cross", "tiny_circle", "broken_arrow"]
images = [draw(f"{name}/9000.png") for name in names]
answers = recognizer(images)
for name, answer in zip(names, answers):
    mark = "" if answer.best.seen else " (new)"
    print(f"{name:13} {answer.best.name}{mark}, {answer.best.probability:.0%}")

figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), layout="constrained")
for place, image, answer in zip(axes, images, answers):
    place.imshow(image)
    place.set_title(answer.best.name, size=7)
    place.axis("off")
figure.savefig("answers.png")
