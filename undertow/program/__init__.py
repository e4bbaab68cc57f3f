"""What runs, how long it takes and how much memory it needs: the model everything else stands on."""
