"""splitpoint bench numerics: one prompt's answer under everything that must not change it."""
