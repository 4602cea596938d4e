-- timings: milliseconds per round, by hardware, batch size and budget.
-- One row per group: medians of the four stages and of the whole round (of the batch, not a sequence's share), and the mean
-- number of rows the batch verified. In a batch of more than one, the budget is this sequence's, the time everybody's.
SELECT
    s.target,
    s.hardware,
    r.batch_size,
    r.budget,
    count(*) AS num_rounds,
    avg(r.batch_rows) AS mean_batch_rows,
    median(r.draft_ns) / 1e6 AS draft_ms,
    median(r.build_ns) / 1e6 AS build_ms,
    median(r.verify_ns) / 1e6 AS verify_ms,
    median(r.commit_ns) / 1e6 AS commit_ms,
    median(r.draft_ns + r.build_ns + r.verify_ns + r.commit_ns) / 1e6 AS round_ms
FROM rounds r
JOIN sequences s USING (unit_id, attempt, sequence_id)
WHERE r.kind = 'decoded'
GROUP BY s.target, s.hardware, r.batch_size, r.budget
ORDER BY s.target, s.hardware, r.batch_size, r.budget;
