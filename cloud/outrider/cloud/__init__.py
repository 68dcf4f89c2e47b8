"""Everything that runs beside the target model: verifier, training and export."""
