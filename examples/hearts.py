"""Draw heart1.png to heart4.png: striped hearts, a pair that `duplex prepare --dataset shapes` does not draw."""

from duplex.data.shapes import draw

for number in range(1, 5):
    draw(f"striped_heart/000{number}.png").save(f"heart{number}.png")
