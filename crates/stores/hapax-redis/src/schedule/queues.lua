-- Counts the entries of each queue.
--
-- KEYS     queues
-- ARGV[1]  name of the keys of due entries, without the queue
--
-- Returns the key, the time, and for each queue its name, the number of its entries and the time at which
-- the first one is due.
local names, failed = call('ZRANGE', KEYS[1], 0, -1)
if failed then
  return failed
end
local queues = {}
for _, name in ipairs(names) do
  local count, first
  count, failed = call('ZCARD', ARGV[1] .. name)
  if failed then
    return failed
  end
  first = redis.call('ZRANGE', ARGV[1] .. name, 0, 0, 'WITHSCORES')
  if count > 0 then
    table.insert(queues, name)
    table.insert(queues, digits(count))
    table.insert(queues, digits(tonumber(first[2])))
  end
end
return {KEYS[1], digits(now), queues}
