"""The precisions of the pack, fastest first, and what each means."""

PRECISIONS: dict[str, str] = {
    "fp4": "NVFP4 for QK^T and PV (SageAttention3)",
    "int8_fp4": "INT8 for QK^T, NVFP4 for PV",
    "int8": "INT8 for QK^T, 8 bits for PV",
    "fp16": "the host's own attention, untouched",
}
