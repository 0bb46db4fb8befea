"""The OpenAPI document of the gateway, made of the tables by which it reads bodies."""
