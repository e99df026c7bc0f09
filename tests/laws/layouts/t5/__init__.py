"""The laws for T5: layouts, engines, resumed and reloaded runs."""
