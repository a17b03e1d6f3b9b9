"""Names of operators in reports and result files, kept from earlier versions."""

#: What reports call operators that had names before there were records.
REPORT_KINDS = {
    "conv2d": "conv", "max_pool2d": "pool", "linear": "fc", "mean_linear": "fc", "pad2d": "pad",
    "conv2d_nhwc": "conv", "conv2d_sum": "conv", "conv2d_beside": "conv", "expand_depthwise": "conv",
    "bottleneck": "conv", "dense_layer": "conv", "inverted_residual": "conv", "conv2d_pool": "conv",
    "depthwise_means": "conv", "depthwise_norm": "conv",
    "max_pool2d_nhwc": "pool", "average_pool2d_nhwc": "average_pool2d",
}  # fmt: skip
