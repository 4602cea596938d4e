-- summary: the store in one row per target.
-- mat: mean acceptance length of decoded rounds, bonus included; mean_budget over all of them; mismatch_rate over those that
-- drafted something; tokens_per_s: tokens of decoded rounds per second of one engine, prefill not included.
WITH decoded AS (
    SELECT
        target,
        count(*) AS num_rounds,
        avg(num_tokens) AS mat,
        avg(budget) AS mean_budget,
        count(*) FILTER (is_mismatch) / nullif(count(*) FILTER (budget > 0), 0) AS mismatch_rate,
        sum(num_tokens) / nullif(sum((draft_ns + build_ns + verify_ns + commit_ns) / batch_size) / 1e9, 0) AS tokens_per_s
    FROM rounds
    WHERE kind = 'decoded'
    GROUP BY target
),
dense AS (
    SELECT target, count(*) AS num_dense_rounds FROM rounds WHERE kind = 'dense' GROUP BY target
),
prompts AS (
    SELECT
        target,
        count(*) AS num_sequences,
        count(*) FILTER (error IS NOT NULL) AS num_errors,
        sum(len(output_token_ids))::BIGINT AS num_output_tokens
    FROM sequences
    GROUP BY target
)
SELECT
    target,
    num_sequences,
    num_errors,
    num_output_tokens,
    coalesce(num_rounds, 0) AS num_rounds,
    coalesce(num_dense_rounds, 0) AS num_dense_rounds,
    mat,
    mean_budget,
    mismatch_rate,
    tokens_per_s
FROM prompts
LEFT JOIN decoded USING (target)
LEFT JOIN dense USING (target)
ORDER BY target;
