"""Operations: at most one effect, whatever the retries."""
