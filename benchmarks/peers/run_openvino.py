"""OpenVINO on a folder of `optimum-cli export openvino --task text-generation-with-past`.

A format of 16 bits is computed in bfloat16; quantized ones as OpenVINO chooses.
"""

import json
from pathlib import Path

import numpy as np
import openvino
import protocol

given = protocol.arguments()
config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": given.threads, "NUM_STREAMS": 1}
if given.format == "bf16":
    config["INFERENCE_PRECISION_HINT"] = "bf16"
model = openvino.Core().compile_model(f"{given.model}/openvino_model.xml", "CPU", config)
request = model.create_infer_request()
names = {one.get_any_name() for one in model.inputs}
past = 0


def reset() -> None:
    global past
    request.reset_state()
    past = 0


def feed(ids: list[int]) -> None:
    global past
    inputs = {
        "input_ids": np.array([ids], dtype=np.int64),
        "attention_mask": np.ones((1, past + len(ids)), dtype=np.int64),
        "position_ids": np.arange(past, past + len(ids), dtype=np.int64)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    request.infer({name: value for name, value in inputs.items() if name in names})
    past += len(ids)


vocabulary = json.loads((Path(given.model) / "config.json").read_text())["vocab_size"]
precision = str(model.get_property("INFERENCE_PRECISION_HINT"))
turn = protocol.steps(given.work, reset, feed, vocabulary=vocabulary)
protocol.take_turns(turn, packages=["openvino"], inference_precision=precision)
