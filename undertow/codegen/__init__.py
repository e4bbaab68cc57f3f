"""From a scheduled graph to what runs it: the generated, readable Python module."""
