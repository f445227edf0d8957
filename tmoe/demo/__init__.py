"""What ``tmoe demo`` shows: a small trained model, before and after `tmoe.replace_moe`."""
