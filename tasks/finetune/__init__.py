"""Fine-tuning a BERT to choose: classes of texts and pairs, grades, and answers to questions."""
