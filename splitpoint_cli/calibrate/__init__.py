"""splitpoint calibrate: the factors that a screen needs, made from text."""
