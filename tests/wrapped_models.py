"""Tiny random transformers models that also read images, around text models of known families."""

import torch
import transformers

from references import BASE, CASES, randomize

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
QWEN3_5_VISION = {name: value for name, value in QWEN_VISION.items() if not name.endswith("indexes")}
LFM2_VISION = {name: VISION[name] for name in VISION if name != "image_size"} | {"num_patches": 4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PARTIAL_MROPE = MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}

# name -> (class of the whole model, values of its text config, values of its vision config)
WRAPPED = {
    "gemma3": ("Gemma3ForConditionalGeneration", CASES["gemma3_text"][2], VISION),
    "gemma4": ("Gemma4ForConditionalGeneration", CASES["gemma4_text-shared"][2], GEMMA4_VISION),
    "mistral3": ("Mistral3ForConditionalGeneration", CASES["mistral"][2] | {"model_type": "mistral"}, VISION),
    "mistral3-ministral3": (
        "Mistral3ForConditionalGeneration",
        CASES["ministral3"][2] | {"model_type": "ministral3"},
        VISION,
    ),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", BASE | {"rope_parameters": MROPE}, QWEN_VISION | {"embed_dim": 32}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", BASE | {"rope_parameters": MROPE}, QWEN_VISION),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        BASE | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN_VISION,
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        CASES["qwen3_5_text"][2] | {"rope_parameters": PARTIAL_MROPE},
        QWEN3_5_VISION,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        CASES["qwen3_5_moe_text"][2] | {"rope_parameters": PARTIAL_MROPE},
        QWEN3_5_VISION,
    ),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", CASES["lfm2"][2], LFM2_VISION),
    "internvl": ("InternVLForConditionalGeneration", BASE | {"model_type": "qwen2"}, VISION),
    "llava": ("LlavaForConditionalGeneration", BASE | {"model_type": "llama"}, VISION),
    "llava_next": ("LlavaNextForConditionalGeneration", BASE | {"model_type": "mistral"}, VISION),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", BASE | {"model_type": "qwen2"}, VISION),
    "idefics3": ("Idefics3ForConditionalGeneration", BASE | {"model_type": "llama"}, VISION),
    "smolvlm": ("SmolVLMForConditionalGeneration", BASE | {"model_type": "llama"}, VISION),
}


def make_wrapped(name: str):
    """A random float32 model that wraps a text model."""
    model_class, text, vision = WRAPPED[name]
    torch.manual_seed(0)
    kind = getattr(transformers, model_class)
    return randomize(kind(kind.config_class(text_config=dict(text), vision_config=dict(vision))).eval())
