"""Write table.csv for photographs like those of docs/tables.md: `python examples/photographs.py styles.csv`.

styles.csv is part of "Fashion Product Images". Then, where the images lie in images/:
`duplex data add photos table.csv --images images --encoder ENCODER --weights WEIGHTS --no-run`.

The small CLIP of the tables has this open_clip_config.json, and was trained on product names as captions:

    {"model_cfg": {
        "embed_dim": 256,
        "vision_cfg": {"image_size": 224, "timm_model_name": "mobilenetv2_100", "timm_model_pretrained": true,
                       "timm_pool": "avg", "timm_proj": "linear", "timm_proj_bias": true},
        "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 192, "heads": 3, "layers": 4}}}
"""

import sys

import pandas as pd

LEAST = ((["state", "object"], 5), (["state"], 50), (["object"], 50))  # images of a pair, a state, an object

styles = pd.read_csv(sys.argv[1], dtype=str, keep_default_na=False, index_col=False, on_bad_lines="skip")
rows = styles.rename(columns={"baseColour": "state", "articleType": "object"})
rows["image"] = rows["id"] + ".jpg"
rows = rows[(rows["state"] != "") & (rows["object"] != "")]
for keys, least in LEAST:
    rows = rows[rows.groupby(keys)["image"].transform("size") >= least]
rows[["image", "state", "object"]].to_csv("table.csv", index=False)
