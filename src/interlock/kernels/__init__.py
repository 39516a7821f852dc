"""The only place that knows a device's arithmetic: native kernels, weight formats, the step slot."""
