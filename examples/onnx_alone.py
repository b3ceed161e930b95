"""Predict with an ONNX file of `scripts.export`, without torch and without anything of this project.

python onnx_alone.py published/resnet50.onnx photos/1.jpg

The file's metadata has the preprocessing and the class names. For HEIC add
`import pillow_heif; pillow_heif.register_heif_opener()`.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
how, classes = json.loads(about["preprocessing"]), json.loads(about["classes"])
if how["crop_mode"] != "center" or how["grey_range"] is not None:
    sys.exit("prepare the image by its crop mode and its range of grey, too")
file = Image.open(sys.argv[2])
image = (ImageOps.exif_transpose(file) if how["exif"] else file).convert("RGB")
size, crop = [how["resize_size"] * side // min(image.size) for side in image.size], how["crop_size"]
image = image.resize(size, Image.Resampling[how["interpolation"].upper()])
left, top = (round((side - crop) / 2) for side in size)
pixels = np.asarray(image.crop((left, top, left + crop, top + crop)), np.float32) / 255
pixels = ((pixels - how["mean"]) / how["std"]).transpose(2, 0, 1)[None].astype(np.float32)
logits = session.run(None, {"input": pixels})[0][0]
shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
print(classes[shares.argmax()], shares.max())
