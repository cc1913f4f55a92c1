"""What runs on the GPU: functions in Triton's language, and nothing else. Sizes and launches are the callers'.

Arguments of these functions carry no annotations but `tl.constexpr`: a constant that a compiled variant is made for.
"""
