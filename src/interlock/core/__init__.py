"""What every floor may know: configuration, the messages of a step, the forward context, buffers, errors."""
