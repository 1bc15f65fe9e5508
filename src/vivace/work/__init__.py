"""What a step must do: operations and bytes, counted on real or fake tensors."""
