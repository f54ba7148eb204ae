"""Tests of the engine-free core. The references are written another way, in float64 and with loops."""
