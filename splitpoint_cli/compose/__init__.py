"""`splitpoint compose`: the settings of a containerised stack."""
