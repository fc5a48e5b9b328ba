"""What looking up needs: landmark index, tiers, the selector's index, passages computed again."""
