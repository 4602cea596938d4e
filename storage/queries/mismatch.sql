-- mismatch: how often the wanted token was in the tree, but under another parent, by task.
-- One row per task, over rounds that drafted something: mismatch_rate = num_mismatched / num_rounds.
SELECT
    s.target,
    s.task,
    count(*) AS num_rounds,
    count(*) FILTER (r.is_mismatch) AS num_mismatched,
    count(*) FILTER (r.is_mismatch) / count(*) AS mismatch_rate
FROM rounds r
JOIN sequences s USING (unit_id, attempt, sequence_id)
WHERE r.kind = 'decoded' AND r.budget > 0
GROUP BY s.target, s.task
ORDER BY s.target, s.task;
